"""`python -m sonicmoe_hf` is the `sonicmoe-hf` command."""

from .cli.main import main

raise SystemExit(main())
