"""Tasks by name. A config may also give a dotted path, "my_package.my_module:my_task".

A task is called with `split` ("train", "val" or "test") and its args, and returns the samples of that split.
"""

TASKS: dict[str, str] = {
    "dummy_pool": "envs.tasks.dummy_pool:dummy_pool",
    "jsonl": "envs.tasks.jsonl:jsonl",
    "movie_reviews": "envs.tasks.movie_reviews:movie_reviews",
}
