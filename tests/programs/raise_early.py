"""Started by tests as a user's script: fit a model whose hook, named by the argument, raises.

python raise_early.py configure_optimizers
"""

import os
import sys

from fit import Line, fit

HOOK = sys.argv[1]


class Raising(Line):
    def configure_model(self):
        self._raise_in("configure_model")

    def configure_optimizers(self):
        self._raise_in("configure_optimizers")
        return super().configure_optimizers()

    def _raise_in(self, hook: str) -> None:
        if hook == HOOK and os.environ["LOCAL_RANK"] == "1":
            raise ValueError(f"rank 1 raises in {hook}")


if __name__ == "__main__":
    fit(Raising(), {})
