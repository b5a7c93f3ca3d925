"""Drafters with weights: small modules that run with a model, over the same pages."""
