"""Train recommendation models whose embedding tables outgrow fast memory."""
