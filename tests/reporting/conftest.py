"""Fixtures of this folder: charts are laid out only for the tests that look at them."""

from tests.charts import charts_without_layout, laid_out_charts

__all__ = ["charts_without_layout", "laid_out_charts"]
