// Package grpclimit limits calls of gRPC with package ratelimit's limits. It has a [Limiter]
// for servers, whose answers clients can trust, and a [Client] for clients, which keeps to the
// answers of servers. Both are interceptors, for unary calls and for streams.
//
// # Servers
//
//	customer := grpclimit.Hashed(grpclimit.BySubject(customerOf)) // from the call's context
//	limit, err := grpclimit.New(store, &grpclimit.Config{
//		Policies: []grpclimit.Policy{
//			{Limit: PerSecond, Key: customer},
//			{Limit: PerDay, Key: customer, Applies: grpclimit.Methods("/shop.Orders/")},
//		},
//		Jitter: 0.1,
//	})
//	if err != nil {
//		return err
//	}
//	server := grpc.NewServer(
//		grpc.ChainUnaryInterceptor(authenticate, limit.Unary),
//		grpc.ChainStreamInterceptor(authenticateStream, limit.Stream),
//	)
//
// All policies that apply grant a call, or nothing is taken from any. The answers:
//
//	granted                      the handler's answer
//	refused                      ResourceExhausted with RetryInfo and QuotaFailure
//	can never be granted         InvalidArgument, since there is no later
//	no usable key or cost        the status that the key or cost says, or InvalidArgument
//	the store does not answer    Unavailable with RetryInfo; or the handler's, with FailOpen
//
// A client that waits for as long as RetryInfo says gets through, if no other call took tokens
// of the same key meanwhile. The trailer grpc-retry-pushback-ms says the same to clients whose
// service configuration has a retry policy.
//
// A stream takes when it is opened, and not for each message: its handler reports in the end the
// tokens that it has really used ([Used]).
//
// A call takes before its handler runs, on its own: it stays spent if the handler's work is
// rolled back. See Config.InTx for a handler that takes in its own transaction. Policies may
// also be of how many calls are handled at a time: see [InFlightPolicy].
//
// # Keys and addresses
//
// A limit is as good as its key. A client that can choose its key has as many limits as it
// likes: so use an authenticated identity, and for addresses say which proxies are trusted
// ([AddressConfig]). Keys appear in no answer.
//
// # Clients
//
//	client, err := grpclimit.NewClient(nil)
//	if err != nil {
//		return err
//	}
//	conn, err := grpc.NewClient(target,
//		grpc.WithChainUnaryInterceptor(client.Unary),
//		grpc.WithChainStreamInterceptor(client.Stream),
//	)
//
// It waits where servers say so, and calls again.
package grpclimit
