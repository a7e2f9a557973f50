"""`python -m sonicmoe_hf` is the `sonicmoe-hf` command."""

from sonicmoe_hf_command import main

raise SystemExit(main())
