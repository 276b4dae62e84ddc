"""What several tests share: reference training, orders of a schedule, plans."""
