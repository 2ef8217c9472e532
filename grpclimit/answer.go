package grpclimit

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/protoadapt"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/edge"
)

// pushback is the trailer that tells clients with a retry policy when to try again.
const pushback = "grpc-retry-pushback-ms"

// answer returns the status of a call that is not let through.
func (l *Limiter) answer(ctx context.Context, e ratelimit.Event) error {
	switch e.Outcome {
	case ratelimit.OutcomeRefused, ratelimit.OutcomePaused:
		return l.refuse(ctx, e)
	case ratelimit.OutcomeTooLarge:
		return tooLarge(e.Err)
	case ratelimit.OutcomeInvalid:
		return badRequest(e.Err)
	}
	if err := ctx.Err(); err != nil { // the client has gone
		return status.FromContextError(err).Err()
	}
	wait := l.config.FailureRetryAfter + rand.N(l.config.FailureRetryAfter)
	return later(ctx, codes.Unavailable, "the call's limits could not be asked", wait)
}

func (l *Limiter) refuse(ctx context.Context, e ratelimit.Event) error {
	failure := &errdetails.QuotaFailure{}
	violated := func(name, description string) {
		failure.Violations = append(failure.Violations, &errdetails.QuotaFailure_Violation{Subject: name, Description: description})
	}
	if e.Permit != nil {
		text, description := "too many calls are under way", fmt.Sprintf("at most %d at a time", e.Permit.InFlight.Limit)
		if e.Permit.InFlight.Mode == ratelimit.ModeRefuse {
			text, description = "the call is refused by a limit's mode", "refused by its mode"
		}
		violated(e.Permit.InFlight.Name, description)
		return later(ctx, codes.ResourceExhausted, text, edge.FullWait(*e.Permit, l.config.FullRetryAfter), failure)
	}
	for _, s := range e.Result.Each() {
		switch {
		case s.OK:
		case s.Request.Mode == ratelimit.ModeRefuse:
			violated(ratelimit.NameOf(s.Request.Limit), "refused by its mode")
		default:
			violated(ratelimit.NameOf(s.Request.Limit), fmt.Sprintf("%d are left", s.Remaining))
		}
	}
	wait := edge.Jittered(e.Result, l.config.Jitter, l.config.MaxJitter)
	return later(ctx, codes.ResourceExhausted, "the call exceeds a quota", wait, failure)
}

// later returns a status that says when to try again, in RetryInfo and in the trailer.
func later(ctx context.Context, code codes.Code, text string, wait time.Duration, details ...protoadapt.MessageV1) error {
	ms := (wait + time.Millisecond - 1) / time.Millisecond
	_ = grpc.SetTrailer(ctx, metadata.Pairs(pushback, strconv.FormatInt(int64(ms), 10))) // without a stream, in a test of a handler, there is none
	s := status.Newf(code, "%s: try again in %v", text, wait)
	if detailed, err := s.WithDetails(append(details, &errdetails.RetryInfo{RetryDelay: durationpb.New(wait)})...); err == nil {
		s = detailed
	}
	return s.Err()
}

func tooLarge(err error) error {
	var exceeds *ratelimit.ExceedsCapacityError
	if !errors.As(err, &exceeds) {
		return status.Error(codes.InvalidArgument, "the call costs more than its limit ever grants")
	}
	return status.Errorf(codes.InvalidArgument, "the call would take %g tokens from %q, which grants at most %g at once: ask for less",
		exceeds.Request.Count, ratelimit.NameOf(exceeds.Request.Limit), exceeds.Most)
}

func badRequest(err error) error {
	if s := statusOf(err); s != nil {
		return s.Err()
	}
	var field *ratelimit.FieldError // the fault is the key's or the count's; its value is not for the client
	if errors.As(err, &field) {
		return status.Errorf(codes.InvalidArgument, "the %s for limit %q %s", lower[field.Field], field.Limit, field.Reason)
	}
	return status.Error(codes.InvalidArgument, "the call cannot be counted")
}

// lower maps the fields of a request to their names in answers.
var lower = map[string]string{"Key": "key", "Count": "cost", "N": "weight"}
