"""`python -m prefill`: the same as `pd-prefill`."""

import sys

from prefill.main import main

sys.exit(main())
