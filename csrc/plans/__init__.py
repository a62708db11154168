"""How the native modules are built: `cpu.plan()` and `cuda.plan()`; `setup.py` carries them out."""
