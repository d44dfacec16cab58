"""apportion inside other frameworks."""
