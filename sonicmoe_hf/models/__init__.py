"""Whole models, as a user patches, loads and builds them: their experts by patching, their routers by routing."""
