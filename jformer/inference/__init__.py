"""A trained run at work: text in, answers, scores and exports out."""
