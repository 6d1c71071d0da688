"""Reward functions by name. A config may also give a dotted path, "my_package.my_module:my_reward"."""

REWARDS: dict[str, str] = {
    "bag_of_words": "envs.rewards.bag_of_words:BagOfWords",
    "increasing_numbers": "envs.rewards.synthetic:increasing_numbers",
    "sentences_with_dates": "envs.rewards.synthetic:sentences_with_dates",
}
