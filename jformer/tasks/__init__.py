"""What a model is trained to do: each task is a value (`task.Task`); `build.TASKS` lists them."""
