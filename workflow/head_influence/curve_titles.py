"""What the figures of the head influence curves are called, without the libraries that draw them."""

# name -> the question that the figure answers
TITLES = {
    "curves": "Head influence curves",
    "curve_map": "Which heads' share of the cache matters?",
    "curve_ranking": "Do the heads keep their rank on other items?",
    "curve_budgets": "Does sharing keys by the curves pay?",
    "curve_upstream": "Do heads that matter in the cache matter to the next layer?",
}
