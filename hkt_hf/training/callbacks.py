"""What a plain Trainer lacks: an order of the data that survives a resume, and times that do."""

import statistics
import time

import torch
from transformers import TrainerCallback
from transformers.trainer_pt_utils import LengthGroupedSampler


class SeededOrderCallback(TrainerCallback):
    """
    Makes the order of each epoch with `group_by_length` a function of the seed and the epoch, as that of Trainer's
    random sampler is.

    Without it the order comes from the global random state, which dropout moves on. A run that resumes within a later
    epoch is not in the state in which that epoch began, so it would draw another order and skip the wrong examples.
    """

    def on_epoch_begin(self, args, state, control, train_dataloader=None, **kwargs):
        sampler = train_dataloader.get_sampler()
        if isinstance(sampler, LengthGroupedSampler):
            seed = args.seed if args.data_seed is None else args.data_seed
            sampler.generator = torch.Generator().manual_seed(seed + int(state.epoch))


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
