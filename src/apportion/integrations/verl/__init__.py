"""apportion inside verl 0.9: trainers, estimators and what they are made of."""
