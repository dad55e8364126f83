"""What a plain Trainer lacks: an order of the data and times that survive a resume, and uploads without pickles."""

import statistics
import time
from pathlib import Path

import torch
from transformers import TrainerCallback
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import HubStrategy


class SeededOrderCallback(TrainerCallback):
    """
    Makes the order of each epoch with `group_by_length` a function of the seed, the epoch and the global batch, as that
    of Trainer's random sampler is.

    Without it the order comes from the global random state, which dropout moves on. A run that resumes within a later
    epoch is not in the state in which that epoch began, so it would draw another order and skip the wrong examples; and
    of several processes each may draw its own, so that some examples come twice and others never.
    """

    def on_epoch_begin(self, args, state, control, train_dataloader=None, **kwargs):
        # Of several processes each takes its share of the batches, from a batch sampler that wraps the usual one.
        batch_sampler = train_dataloader.batch_sampler
        sampler = getattr(batch_sampler, "batch_sampler", batch_sampler).sampler
        if isinstance(sampler, LengthGroupedSampler):
            seed = args.seed if args.data_seed is None else args.data_seed
            sampler.generator = torch.Generator().manual_seed(seed + int(state.epoch))
            sampler.batch_size = args.train_batch_size * args.gradient_accumulation_steps * args.world_size


class TimeCallback(TrainerCallback):
    """
    Adds two times to every entry of the learning curve, where a checkpoint keeps them.

    `seconds` is the wall time since the start of training, evaluation included, summed over resumes. `step_seconds` is
    the median time from one step to the next since the last entry: loading is part of it, and the few steps that
    evaluation or saving follow do not move it.
    """

    def __init__(self):
        self.seconds_before = 0.0
        self.started = time.perf_counter()
        self.step_starts: list[float] = []

    def on_train_begin(self, args, state, control, **kwargs):
        self.seconds_before = state.log_history[-1]["seconds"] if state.log_history else 0.0
        self.started = time.perf_counter()

    def on_step_begin(self, args, state, control, **kwargs):
        self.step_starts.append(time.perf_counter())

    def on_log(self, args, state, control, **kwargs):
        entry = state.log_history[-1]
        entry["seconds"] = self.seconds_before + time.perf_counter() - self.started
        if len(self.step_starts) > 1:
            steps = [after - before for before, after in zip(self.step_starts, self.step_starts[1:], strict=False)]
            entry["step_seconds"] = statistics.median(steps)
            self.step_starts = self.step_starts[-1:]


class NoPicklesCallback(TrainerCallback):
    """
    Keeps pickles out of what `Trainer(push_to_hub=True, callbacks=[NoPicklesCallback()])` uploads.

    Without it every push holds `training_args.bin`, which has the paths of your machine in it. The Hub takes no file
    that the repository's `.gitignore` excludes, and that file is uploaded with the others.

    Raises:
        ValueError: when the Trainer is made, if `hub_strategy` uploads checkpoints: a checkpoint without the
            optimiser's pickled state is none, and the two uploads of such a strategy run at the same time, so that
            pickles may arrive before the `.gitignore`.
    """

    PATTERNS = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.pickle", "*.ckpt")

    def on_init_end(self, args, state, control, **kwargs):
        if args.push_to_hub and args.hub_strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
            raise ValueError(
                f"hub_strategy={args.hub_strategy.value!r} uploads the optimiser's state, a pickle: use 'every_save' "
                "or 'end', and resume from the checkpoints in output_dir."
            )

    def on_push_begin(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            path = Path(args.output_dir) / ".gitignore"
            lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
            lines += [pattern for pattern in self.PATTERNS if pattern not in lines]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")
