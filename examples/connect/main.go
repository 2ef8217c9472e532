// Connect has limits in front of handlers of connectrpc.com/connect:
//
//	go run ./examples/connect
//
// The middleware of httplimit answers in the client's own protocol, of three: Connect, gRPC and
// gRPC-Web. Without that a client of Connect takes a 429 for unavailable, and calls again at once.
package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/httplimit"
	"github.com/pgratelimit/ratelimit/memstore"
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

const placeProcedure = "/shop.Orders/Place"

var perCustomer = ratelimit.TokenBucket{Name: "per_customer", Rate: 1, Period: time.Minute, Capacity: 3}

// service returns the handlers behind the limits; in production the store is pgstore's.
func service(store httplimit.Store) (http.Handler, error) {
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

const watchProcedure = "/shop.Orders/Watch"

// protocols are how clients may speak.
var protocols = map[string][]connect.ClientOption{
	"connect":  nil,
	"gRPC":     {connect.WithGRPC()},
	"gRPC-Web": {connect.WithGRPCWeb()},
}

// start serves h without encryption, by HTTP/2 too, as gRPC needs it.
func start(h http.Handler) *httptest.Server {
	server := httptest.NewUnstartedServer(h)
	server.Config.Protocols = new(http.Protocols)
	server.Config.Protocols.SetHTTP1(true)
	server.Config.Protocols.SetUnencryptedHTTP2(true)
	server.Start()
	transport := server.Client().Transport.(*http.Transport)
	transport.Protocols = new(http.Protocols)
	transport.Protocols.SetUnencryptedHTTP2(true)
	return server
}

// place places an order as a customer, who may state how many orders it is to count as.
func place(server *httptest.Server, customer, orders string, options ...connect.ClientOption) error {
	r := connect.NewRequest(wrapperspb.String("an order"))
	setHeader(r.Header(), customer, orders)
	_, err := connect.NewClient[wrapperspb.StringValue, wrapperspb.StringValue](server.Client(), server.URL+placeProcedure, options...).CallUnary(context.Background(), r)
	return err
}

// watch is place for a stream.
func watch(server *httptest.Server, customer, orders string, options ...connect.ClientOption) error {
	r := connect.NewRequest(wrapperspb.String("an order"))
	setHeader(r.Header(), customer, orders)
	stream, err := connect.NewClient[wrapperspb.StringValue, wrapperspb.StringValue](server.Client(), server.URL+watchProcedure, options...).CallServerStream(context.Background(), r)
	if err != nil {
		return err
	}
	defer stream.Close()
	for stream.Receive() {
	}
	return stream.Err()
}

func setHeader(h http.Header, customer, orders string) {
	if customer != "" {
		h.Set("X-Customer", customer)
	}
	if orders != "" {
		h.Set("X-Orders", orders)
	}
}

// retryInfo returns the wait that an error names, or -1.
func retryInfo(err error) time.Duration {
	var failure *connect.Error
	if errors.As(err, &failure) {
		for _, d := range failure.Details() {
			if value, err := d.Value(); err == nil {
				if info, ok := value.(*errdetails.RetryInfo); ok {
					return info.RetryDelay.AsDuration()
				}
			}
		}
	}
	return -1
}

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "connect:", err)
		os.Exit(1)
	}
}

// run places four orders by each protocol, of which the last is refused.
func run() error {
	for name, options := range protocols {
		h, err := service(memstore.New(nil))
		if err != nil {
			return err
		}
		server := start(h)
		defer server.Close()
		for range 3 {
			if err := place(server, "acme", "", options...); err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
		}
		err = place(server, "acme", "", options...)
		fmt.Printf("%s: %v, again in %v\n", name, connect.CodeOf(err), retryInfo(err))
		if connect.CodeOf(err) != connect.CodeResourceExhausted {
			return fmt.Errorf("%s: got %w, want a refusal", name, err)
		}
	}
	return nil
}
