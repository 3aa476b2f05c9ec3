"""`python -m lightning_mgwfbp`: the command `lightning-mgwfbp`."""

import sys

from lightning_mgwfbp.cli import main

sys.exit(main())
