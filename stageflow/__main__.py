"""`python -m stageflow …` is `stageflow …`."""

import sys

from stageflow.cli import main

if __name__ == "__main__":
    sys.exit(main())
