"""Tools for people at the keyboard: the command line, planning, autopatch, the demo. What trains imports none of them."""
