"""One update after another: the state, the step, the loop and what it reports."""
