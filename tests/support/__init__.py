"""What several tests share: models and their training, plans, schedules and their orders, the command line."""
