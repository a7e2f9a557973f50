"""`python -m sonicmoe_hf` is the `sonicmoe-hf` command."""

from .cli import main

raise SystemExit(main())
