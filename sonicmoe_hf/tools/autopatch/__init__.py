"""`sonicmoe-hf run`: a program of somebody else's, in which every model is patched as it is built, and its children."""
