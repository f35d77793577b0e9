"""From a model to a plan, and the step that follows it."""
