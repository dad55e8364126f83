#!/usr/bin/env python
"""Push a model to the Hub: python scripts/push_to_hub.py model_cards/hkt-tiny-imdb --repo-id user/hkt-tiny-imdb"""

import argparse
import sys
from pathlib import Path

from huggingface_hub.errors import HfHubHTTPError

from hkt_hf import __version__
from hkt_hf.training.cards import write_card
from hkt_hf.training.publish import push_folder

TEMPLATE = Path(__file__).resolve().parent.parent / "model_cards" / "template.md"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Write the card of a finished run, and push the run's model to the Hub."
    )
    parser.add_argument("folder", type=Path, help="output folder of a finished run, or a folder in model_cards/")
    parser.add_argument("--repo-id", required=True, metavar="USER/NAME")
    parser.add_argument("--private", action="store_true", help="if the repository is new, nobody else can read it")
    parser.add_argument("--tag", default=f"v{__version__}", help="of the commit, and in the card; default: %(default)s")
    parser.add_argument("--card-only", action="store_true", help="write README.md and push nothing")
    options = parser.parse_args(arguments)
    try:
        write_card(options.folder, options.repo_id, TEMPLATE, options.tag)
        if options.card_only:
            return 0
        commit = push_folder(options.folder, options.repo_id, private=options.private, tag=options.tag)
    except (ValueError, OSError, HfHubHTTPError) as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    print(commit.commit_url)
    return 0


if __name__ == "__main__":
    sys.exit(main())
