"""`python -m proxy`: the same as `pd-proxy`."""

import sys

from proxy.main import main

sys.exit(main())
