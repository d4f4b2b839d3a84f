#include "comm/gloo/gloo_communicator.h"

#include <utility>

#include "comm/gloo/gloo_work.h"

namespace bmtrain {

GlooCommunicator::GlooCommunicator(c10::intrusive_ptr<c10d::ProcessGroup> process_group, int rank, int size,
                                   std::string name, double timeout_seconds)
    : ExchangeCommunicator(rank, size, name),
      link_(std::make_shared<GlooLink>(std::move(process_group), rank, size, std::move(name),
                                       timeout_seconds)) {}

WorkPtr GlooCommunicator::submit(Exchange exchange) {
  return GlooWork::start(link_, GlooOperation{std::move(exchange)});
}

}  // namespace bmtrain
