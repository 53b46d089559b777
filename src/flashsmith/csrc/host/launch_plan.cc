#include "host/launch_plan.h"

#include <variant>

namespace flashsmith {

LaunchPlan plan_forward(const KernelConfig& config, const ForwardProblem& problem,
                        const DeviceSpec& device) {
    const auto found = kernel_map().find(config);
    require(found != kernel_map().end(), "the config is not in this kernel library");
    LaunchPlan plan = std::visit(
        [&](const auto& cfg) { return plan_launch(cfg, problem, device, kernel_semantics()); },
        config);
    plan.config = config;
    plan.kernel = found->second;
    return plan;
}

}  // namespace flashsmith
