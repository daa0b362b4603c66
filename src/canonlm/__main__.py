"""`python -m canonlm` is the `canonlm` command."""

import sys

from canonlm.cli import main

sys.exit(main())
