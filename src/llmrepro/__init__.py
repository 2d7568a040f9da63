"""llmrepro re-runs published LLM-inference measurements and says honestly whether they hold."""

__version__ = "0.1.0"
