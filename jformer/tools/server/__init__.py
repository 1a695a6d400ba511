"""A trained run that answers over HTTP: a page to type into, and JSON for programs. Needs the extra `serve`."""
