"""Thin adapters to trainers; each module needs the package that it is named after."""
