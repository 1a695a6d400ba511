"""What is built on a trained run and is not needed to understand one. The core never imports from here."""
