"""A backend is a module, an operator is a function in it; see ``fastattn.dispatch``."""
