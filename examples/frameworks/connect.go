package frameworks

import (
	"context"
	"errors"
	"net/http"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/httplimit"
)

// connectCodes are the codes of the statuses with which the middleware answers. Another one is a
// fault of the call.
var connectCodes = map[int]connect.Code{
	http.StatusTooManyRequests:    connect.CodeResourceExhausted,
	http.StatusServiceUnavailable: connect.CodeUnavailable,
	http.StatusUnauthorized:       connect.CodeUnauthenticated,
	http.StatusForbidden:          connect.CodePermissionDenied,
}

var connectErrors = connect.NewErrorWriter()

// writeConnect answers in the protocol of the client, with the wait as RetryInfo.
func writeConnect(w http.ResponseWriter, r *http.Request, p *httplimit.Problem) {
	code, ok := connectCodes[p.Status]
	if !ok {
		code = connect.CodeInvalidArgument
	}
	failure := connect.NewError(code, errors.New(p.Detail))
	if p.RetryAfter > 0 {
		info := &errdetails.RetryInfo{RetryDelay: durationpb.New(p.RetryAfter)}
		if detail, err := connect.NewErrorDetail(info); err == nil {
			failure.AddDetail(detail)
		}
	}
	connectErrors.Write(w, r, failure) // the client may have gone
}

const (
	placeProcedure = "/shop.Orders/Place"
	watchProcedure = "/shop.Orders/Watch"
)

var perCustomer = ratelimit.TokenBucket{Name: "per_customer", Rate: 1, Period: time.Minute, Capacity: 3}

// Connect has handlers behind limits that are answered in the client's own protocol, of three:
// Connect, gRPC and gRPC-Web. Without WriteProblem a client of Connect takes a 429 for unavailable,
// and calls again at once.
func Connect(store httplimit.Store) (http.Handler, error) {
	limit, err := httplimit.New(store, &httplimit.Config{
		Policies:     []httplimit.Policy{{Limit: perCustomer, Key: httplimit.ByHeader("X-Customer"), Cost: httplimit.CostFromHeader("X-Orders", 1, 1)}},
		WriteProblem: writeConnect,
	})
	if err != nil {
		return nil, err
	}
	mux := http.NewServeMux()
	mux.Handle(placeProcedure, connect.NewUnaryHandler(placeProcedure,
		func(_ context.Context, r *connect.Request[wrapperspb.StringValue]) (*connect.Response[wrapperspb.StringValue], error) {
			return connect.NewResponse(wrapperspb.String("placed " + r.Msg.Value)), nil
		}))
	mux.Handle(watchProcedure, connect.NewServerStreamHandler(watchProcedure,
		func(_ context.Context, r *connect.Request[wrapperspb.StringValue], s *connect.ServerStream[wrapperspb.StringValue]) error {
			return s.Send(wrapperspb.String("watched " + r.Msg.Value))
		}))
	return limit.Handler(mux), nil
}
