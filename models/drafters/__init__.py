"""Drafters with weights: small modules that run beside a model, over the same pages."""
