package frameworks

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/httplimit"
	"github.com/pgratelimit/ratelimit/memstore"
)

// call is a request, and the status of its answer.
type call struct {
	method, path string
	want         int
}

func TestRouters(t *testing.T) {
	const right = "/login?password=correct+horse+battery+staple"
	for name, router := range map[string]struct {
		service func(httplimit.Store) (http.Handler, error)
		calls   []call
	}{
		"chi": {Chi, []call{{"GET", "/reports/1", 200}, {"GET", "/reports/2", 200}, {"GET", "/reports/3", 429}, {"GET", "/exports/1", 200}}},
		"echo": {Echo, []call{
			{"GET", "/reports/1", 200}, {"POST", "/login?password=a", 401}, {"POST", right, 204}, {"POST", "/login?password=b", 401}, {"POST", right, 429},
		}},
	} {
		h, err := router.service(memstore.New(nil))
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range router.calls {
			w := httptest.NewRecorder()
			h.ServeHTTP(w, httptest.NewRequest(c.method, c.path, nil))
			if w.Code != c.want {
				t.Errorf("%s, %s: got %d, want %d", name, c.path, w.Code, c.want)
			}
		}
	}
}

// protocols are how clients may speak.
var protocols = map[string][]connect.ClientOption{
	"connect":  nil,
	"gRPC":     {connect.WithGRPC()},
	"gRPC-Web": {connect.WithGRPCWeb()},
}

// serve serves Connect without encryption, by HTTP/2 too, as gRPC needs it.
func serve(t *testing.T, store httplimit.Store) *httptest.Server {
	t.Helper()
	h, err := Connect(store)
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewUnstartedServer(h)
	t.Cleanup(server.Close)
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

// broken is a store that does not answer.
type broken struct{}

func (broken) Allow(context.Context, ...ratelimit.Request) (ratelimit.Result, error) {
	return ratelimit.Result{}, errors.New("the database is down")
}

func (broken) Settle(context.Context, *ratelimit.Receipt, ...float64) (ratelimit.Result, error) {
	return ratelimit.Result{}, errors.New("the database is down")
}

// Every answer of the middleware has the right code in all protocols, for calls and for streams,
// and RetryInfo where a wait helps.
func TestEveryAnswerHasItsCode(t *testing.T) {
	for name, options := range protocols {
		for verb, call := range map[string]func(*httptest.Server, string, string, ...connect.ClientOption) error{"a call": place, "a stream": watch} {
			up, down := serve(t, memstore.New(nil)), serve(t, broken{})
			for range 3 {
				if err := call(up, "acme", "", options...); err != nil {
					t.Fatalf("%s of %s: %v", verb, name, err)
				}
			}
			for _, test := range []struct {
				status           int
				customer, orders string
				server           *httptest.Server
				code             connect.Code
				least, most      time.Duration // of RetryInfo
			}{
				{429, "acme", "", up, connect.CodeResourceExhausted, time.Second, time.Minute},
				{422, "acme", "4", up, connect.CodeInvalidArgument, -1, -1},
				{400, "", "", up, connect.CodeInvalidArgument, -1, -1},
				{400, "acme", "-1", up, connect.CodeInvalidArgument, -1, -1},
				{503, "acme", "", down, connect.CodeUnavailable, 5 * time.Second, 10 * time.Second},
			} {
				err := call(test.server, test.customer, test.orders, options...)
				if got := connect.CodeOf(err); got != test.code {
					t.Errorf("%d, %s of %s: got %v, %v, want %v", test.status, verb, name, got, err, test.code)
				}
				if got := retryInfo(err); got < test.least || got > test.most {
					t.Errorf("%d, %s of %s: RetryInfo is %v, want %v to %v", test.status, verb, name, got, test.least, test.most)
				}
			}
		}
	}
}
