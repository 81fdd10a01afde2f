"""``python -m extproc.simulator`` is ``extproc replica``."""

import argparse
import sys

from extproc.simulator.command import add_arguments, run

parser = argparse.ArgumentParser(prog="extproc replica", description="A simulated vLLM replica.")
add_arguments(parser)
sys.exit(run(parser.parse_args()))
