"""`python -m canonlm` is the `canonlm` command."""

import sys

from canonlm.cli import main

if __name__ == "__main__":  # not in processes that it starts, which import this module
    sys.exit(main())
