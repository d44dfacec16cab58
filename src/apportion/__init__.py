"""apportion: fine-grained credit assignment for critic-free LLM reinforcement learning."""
