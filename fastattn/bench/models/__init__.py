"""Whole models as operators of the benchmark: one file for each architecture of a library.

Like a file of `bench/ops`, each defines OP, an instance of `_model.Model`; `ops.MODELS` lists them.
`presets.WHOLE_MODELS` has the sizes of real models. A library is imported when a model is built.
"""
