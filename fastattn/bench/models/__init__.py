"""Whole models of transformers as operators of the benchmark: one file for each architecture.

Like a file of `bench/ops`, each defines OP, an instance of `_model.Model`; `ops.MODELS` lists them.
`presets.WHOLE_MODELS` has the sizes of real models. transformers is imported when a model is built.
"""
