"""A job driver: one life of the job, as a child process of `python -m recipes.prefix_recovery`.

    python -m recipes.prefix_recovery.driver first|second --plan PLAN.json

It starts a cluster of its own, runs that life's part of the job, and tells what happens as JSON lines on standard
output (see `recipes.prefix_recovery.events`); its log goes to standard error.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from policies.errors import RegraftError
from recipes.prefix_recovery import events, first_life, second_life
from recipes.prefix_recovery.plan import Plan

LIVES = {"first": first_life.live, "second": second_life.live}


def main() -> int:
    parser = argparse.ArgumentParser(prog="recipes.prefix_recovery.driver", description=__doc__)
    parser.add_argument("life", choices=LIVES)
    parser.add_argument("--plan", required=True, type=Path)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    events.reserve_output()
    try:
        LIVES[arguments.life](Plan.read(arguments.plan))
    except Exception as error:
        if not isinstance(error, RegraftError):
            logging.exception("this life of the job ends")
        cause = getattr(error, "cause", None) or error  # what an actor raised, without Ray's account of where
        events.emit(events.Error(message=str(cause), kind=type(cause).__name__))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
