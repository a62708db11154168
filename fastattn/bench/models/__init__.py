"""Whole models of transformers as operators of the benchmark: one file for each architecture.

Each has an OP that is a `_model.Model`, as the files of `bench/ops` have one; `ops.MODELS` lists
them. `zoo.ZOO` has the sizes of models that people run. transformers is imported when a model is
built, not before.
"""
