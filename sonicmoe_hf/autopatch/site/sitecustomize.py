"""Python imports this when it starts, because `sonicmoe-hf run` has put this folder on PYTHONPATH. It imports the
sitecustomize that this one hides, and then has models patched as `sonicmoe-hf run` was asked to."""

import os
import sys
import traceback

import sonicmoe_hf_startup

_HERE = os.path.dirname(os.path.abspath(__file__))


def _patch_models():
    variable = os.environ.get("SONICMOE_HF_RUN")
    if not variable:
        return
    try:
        if sonicmoe_hf_startup.is_meant(variable):
            sonicmoe_hf_startup.install()
    except Exception as error:  # Python goes on after one, and models would not be patched
        traceback.print_exc()
        raise SystemExit("sonicmoe-hf run: models cannot be patched in this process") from error


try:
    sonicmoe_hf_startup.load("sitecustomize", [folder for folder in sys.path if os.path.abspath(folder) != _HERE])
finally:  # also after an error of theirs, which Python prints before it goes on
    _patch_models()
