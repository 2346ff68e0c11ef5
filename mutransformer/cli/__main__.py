"""`python -m mutransformer.cli`, the same as the command `mutransformer`."""

import sys

from mutransformer.cli import main

sys.exit(main())
