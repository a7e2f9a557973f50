"""`python -m sonicmoe_hf` is the `sonicmoe-hf` command."""

from .tools.cli.main import main

raise SystemExit(main())
