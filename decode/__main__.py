"""`python -m decode`: the same as `pd-decode`."""

import sys

from decode.main import main

sys.exit(main())
