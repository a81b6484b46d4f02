"""A click model with the interface of scikit-learn's estimators."""
