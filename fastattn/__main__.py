import sys

from fastattn.cli import main

sys.exit(main())
