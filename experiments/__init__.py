"""One file per question, and the lab book of what they found."""
